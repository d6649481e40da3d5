"""Real exports for the tests: the loader (``library``), the scrubber (``strip``), cloning (``grow``), and the makers."""

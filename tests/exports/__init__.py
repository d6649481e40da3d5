"""Real exports for tests: the loader (``library``), the scrubber (``strip``), cloning (``grow``), the makers."""

"""What the op folders share."""

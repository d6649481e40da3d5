"""Tests of the Python face: API, files, CLI, report, registry, examples."""

"""The ``meshnet`` command."""

"""Other packages: flashlin's repairs put into one that cannot be edited."""

"""Integrations with other packages: flashlin's functions replace theirs, without any edit to their files."""

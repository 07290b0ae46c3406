"""Scripts for those who work on the project: stubs, documents, the figures of order, make's environment."""

"""Scripts for maintainers: they write stubs and documents, measure code and compare checkouts."""

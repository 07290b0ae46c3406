"""Cross entropy over a vocabulary."""

"""Row-wise normalisations."""

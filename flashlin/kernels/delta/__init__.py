"""The delta families: delta rule and gated delta rule."""

"""Mamba's selective scan: a state per channel whose decay depends on the token."""

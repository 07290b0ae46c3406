"""Descriptions of calls and kernel launches, and the checks that decide if a launch can run."""

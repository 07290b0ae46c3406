"""What works on this machine, and what one call would do: doctor and explain, their probes, checks, typical
calls and report."""

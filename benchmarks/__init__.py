"""Speed: what is timed, how, and what came out."""

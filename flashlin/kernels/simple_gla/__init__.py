"""Scalar decay: simple GLA, retention, lightning attention, linear attention."""

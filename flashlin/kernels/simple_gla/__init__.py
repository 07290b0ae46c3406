"""Linear attention with scalar decays: simple GLA, retention, lightning attention and linear attention."""

"""Experiments: several drafts over one data set, measured alike, and claims decided by a stated rule."""

"""Speculative decoding in plain torch: the reference that estimates and servers are held against."""

"""Ranks as real processes: start them, watch them, stop them, and say where each stood."""

"""Ranks as real processes: start them, watch them, connect them, and say where each stood."""

"""Readers with every fault that a trial must find."""

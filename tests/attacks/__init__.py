"""Attacks as an attacker would run them: quick forms as tests, long ones marked slow, measurements as scripts."""

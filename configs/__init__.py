"""YAML files of facts. This module makes the folder package data, so that no other configs/ can replace it."""

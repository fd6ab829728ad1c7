"""Planner: predicts memory, speed and cost of a deployment before it is built."""

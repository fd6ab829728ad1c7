"""Network clients and formats that several rooms share."""

"""Network clients and formats that several packages share."""

"""Search for the settings with which a target serves most on this machine, by measuring them."""

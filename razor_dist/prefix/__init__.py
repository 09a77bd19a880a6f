"""The prefix cache: its index, its tiers (device, host memory, disk), and transfers."""

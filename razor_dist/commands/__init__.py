"""The subcommands of ``razor-dist``."""

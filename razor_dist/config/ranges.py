"""Ranges that settings must lie in, refused in the same words everywhere."""

from __future__ import annotations

from razor_dist.config.errors import ConfigError


def check_least(settings: object, **least: int) -> None:
    """Raise `ConfigError` unless each attribute that is named is at least its number, or None."""
    for name, number in least.items():
        value = getattr(settings, name)
        if value is not None and value < number:
            raise ConfigError(f"{name} must be at least {number}, got {value}")


def check_fraction(name: str, value: float) -> None:
    """Raise `ConfigError` unless a value is from 0 to 1."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} must be from 0 to 1, got {value}")


def check_percent(name: str, value: float) -> None:
    """Raise `ConfigError` unless a value is from 0 to 100."""
    if not 0 <= value <= 100:
        raise ConfigError(f"{name} must be a percentage from 0 to 100, got {value}")


def check_seed(seed: int) -> None:
    """Raise `ConfigError` unless generators of random numbers take the seed."""
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be at least 0 and below 2**63, got {seed}")

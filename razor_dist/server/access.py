"""Access control: known hosts and origins, API keys, and limits for each key."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from razor_dist.api.errors import Failure
from razor_dist.config.errors import ConfigError, RequestError
from razor_dist.config.schema import ServerConfig
from razor_dist.config.sources import read_text
from razor_dist.config.validation import is_key
from razor_dist.server.request_log import current_record

log = logging.getLogger(__name__)

# What a load balancer asks, which has no key, and the page, which asks for one.
_OPEN_PATHS = frozenset({"/health", "/"})
_OPEN_FOLDER = "/page/"


@dataclass(eq=False)
class _Account:
    """One request of a key's holder: its tokens, and the engine's names for its answers."""

    holder: KeyHolder
    tokens: int = 0
    answers: Callable[[], Sequence[str]] = tuple


class RateLimitError(RequestError):
    """A key's limit is reached; ``groups`` are the answers of each of its requests in flight."""

    def __init__(self, message: str, groups: list[Sequence[str]]) -> None:
        super().__init__(message, code="rate_limit_exceeded")
        self.groups = groups


@dataclass
class KeyHolder:
    """One API key: its requests in flight, and the name that stands for it.

    ``id`` are 16 hexadecimal digits of the key's SHA-256; it may be logged, the key may not.
    """

    id: str
    max_requests: int | None = None
    max_tokens: int | None = None
    accounts: set[_Account] = field(default_factory=set)

    @property
    def tokens(self) -> int:
        return sum(account.tokens for account in self.accounts)

    def check_request(self) -> None:
        """Raise `RateLimitError` unless one more request may begin."""
        if self.max_requests is not None and len(self.accounts) >= self.max_requests:
            raise self._limited(
                f"this key has {len(self.accounts)} requests in flight, as many as one key may "
                "have; try again later"
            )

    def check_tokens(self, tokens: int) -> None:
        """Raise `RequestError` unless this many more tokens may be in flight.

        It is a `RateLimitError` if they may be later.
        """
        if self.max_tokens is None:
            return
        if tokens > self.max_tokens:
            raise RequestError(
                f"this request asks for {tokens} tokens, prompt and answers together; one key "
                f"may have {self.max_tokens} (--max-tokens-per-key): give 'max_tokens', or a lower "
                "one, or shorten the prompt",
                param="max_tokens",
            )
        if self.tokens + tokens > self.max_tokens:
            raise self._limited(
                f"this key has {self.tokens} tokens in flight and asks for {tokens} more, prompt "
                f"and answers together; one key may have {self.max_tokens}"
            )

    def _limited(self, message: str) -> RateLimitError:
        return RateLimitError(message, [account.answers() for account in self.accounts])


_account: ContextVar[_Account | None] = ContextVar("account", default=None)


def charge(tokens: int) -> None:
    """Count tokens of the current request for its key until its response has ended.

    Raises `RequestError` if the key may not have as many, ever or beside those in flight
    (`RateLimitError`).
    """
    account = _account.get()
    if account is not None:
        account.holder.check_tokens(tokens)
        account.tokens += tokens


def note_answers(answers: Callable[[], Sequence[str]]) -> None:
    """Note the current request's answers: a refused request waits for the end of another's."""
    account = _account.get()
    if account is not None:
        account.answers = answers


@contextmanager
def _on_account(holder: KeyHolder | None) -> Iterator[None]:
    """Count a request of a key's holder, and what is charged meanwhile."""
    if holder is None:
        yield
        return
    account = _Account(holder)
    holder.accounts.add(account)
    token = _account.set(account)
    try:
        yield
    finally:
        _account.reset(token)
        holder.accounts.remove(account)


class Access:
    """ASGI middleware that refuses what must not reach the application.

    In this order: a foreign ``Host`` on a server that listens on loopback, since a page's own
    domain may be made to lead there (DNS rebinding: 403); a foreign ``Origin`` (403); a missing or
    unknown key (401); more requests than a key may have in flight (429).

    ``bound`` is the address on which the server listens, if it is not ``config.host``, a name.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        holders: dict[bytes, KeyHolder],
        retry_after: Callable[[Exception], int],
        bound: str | None = None,
    ) -> None:
        self.app = app
        self._retry_after = retry_after
        self._holders = holders
        self._origins = {origin.lower() for origin in config.allowed_origins}
        hosts = {host.lower().removesuffix(".") for host in config.allowed_hosts}
        self._any_host = "*" in hosts or not (hosts or is_loopback(bound or config.host))
        self._hosts = hosts | {config.host.lower(), "localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self._check_browser(headers)
            holder = self._holder(scope["path"], headers)
            counted = holder if scope["method"] == "POST" else None
            if counted is not None:
                counted.check_request()
        except RequestError as error:
            response = Failure.of(error).response(self._retry_after(error), scope["path"])
            await response(scope, receive, send)
            return
        with _on_account(counted):
            await self.app(scope, receive, send)

    def _check_browser(self, headers: Headers) -> None:
        host = headers.get("host")
        # Without one it is HTTP/1.0, which no browser speaks.
        if host is not None and not self._any_host:
            name = _host_name(host)
            # What leads to an address cannot be made to lead elsewhere: rebinding needs a name.
            if name not in self._hosts and not _is_address(name):
                raise RequestError(
                    f"this server is not known as {name!r:.80}; name it with --allowed-hosts",
                    code="host_not_allowed",
                )
        origin = headers.get("origin", "").lower()
        own = origin.partition("://")[2] == (host or "").lower()
        if origin and not own and not {"*", origin} & self._origins:
            raise RequestError(
                f"pages of {origin!r:.80} may not use this server; name them with "
                "--allowed-origins",
                code="origin_not_allowed",
            )

    def _holder(self, path: str, headers: Headers) -> KeyHolder | None:
        """Return the holder of a request's key; ``None`` if no key is wanted."""
        if not self._holders or path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER):
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given:  # a proxy's own, say: Anthropic's header
            given = headers.get("x-api-key", "")
        digest = hashlib.sha256(given.strip().encode()).digest()
        found = None
        # All of them, so that the time does not show which key matched.
        for known, holder in self._holders.items():
            if hmac.compare_digest(known, digest):
                found = holder
        if found is None:
            raise RequestError(
                "this server wants a key that it knows, in the header 'Authorization: Bearer KEY' "
                "or 'x-api-key: KEY'",
                code="invalid_api_key",
            )
        current_record().key = found.id
        return found


def load_keys(config: ServerConfig) -> dict[bytes, KeyHolder]:
    """Return the holders of the configured keys by the SHA-256 of each.

    Raises `ConfigError`, which quotes no key, if the file of keys cannot be used.
    """
    keys = list(config.api_key)
    if config.api_key_file is not None:
        path = Path(config.api_key_file)
        lines = read_text(path, "api_key_file").splitlines()
        found = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
        found = [key for key in found if key]
        if not found or not all(map(is_key, found)):
            raise ConfigError(
                f"api_key_file {path} must hold a key on each line, of printable ASCII without "
                "spaces, and one at least"
            )
        if path.stat().st_mode & 0o077:
            log.warning("other users can read the keys in %s: chmod 600", path)
        keys += found
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]
    limits = config.max_requests_per_key, config.max_tokens_per_key
    return {digest: KeyHolder(digest.hex()[:16], *limits) for digest in digests}


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return what TLS needs, ``None`` without it; `ConfigError` if its files cannot be used."""
    certificate, key = config.ssl_certfile, config.ssl_keyfile
    if certificate is None or key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # The password of an encrypted key would be asked for on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except OSError as error:
        problem = getattr(error, "reason", None) or error.strerror or "it is encrypted or no PEM"
        raise ConfigError(
            f"ssl_certfile {certificate} and ssl_keyfile {key} cannot be used: {problem}"
        ) from None
    return context


def _host_name(header: str) -> str:
    """Return the host of a ``Host`` header: no port, no brackets of IPv6, no final dot."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower().removesuffix(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether a name or address leads to this machine alone."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback

"""How the server listens, and who may come in.

Invariant: without a login the server is reachable from this machine alone, and by no name that others use for it.
"""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from chatpage.server.log_settings import LogSettings
from chatpage.session.limits import SessionLimits

DEFAULT_PORT = 8642


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Settings of one server.

    Args:
        host: Address to listen on. Any but a loopback address needs users.
        port: 0 takes a free one.
        data_dir: Folder of the database; None: the platform's folder for user data.
        allowed_hosts: Names in the `Host` header that are served besides the loopback ones, without port.
        allowed_origins: Pages of these origins, such as "https://chat.example", may call the server besides its own.
        require_login: Ask for a login or key on loopback too.
        secure_cookies: Browsers reach the server by https only, through a proxy.
        limits: Per user.
        logs: What is written about what goes on.
        keep_deleted_days: How long what was deleted can be restored; then it is removed for good.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    data_dir: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    require_login: bool = False
    secure_cookies: bool = False
    limits: SessionLimits = field(default_factory=SessionLimits)
    logs: LogSettings = field(default_factory=LogSettings)
    keep_deleted_days: int = 30

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback_name(self.host)

    @property
    def needs_users(self) -> bool:
        """Whether a key or a login is needed. A loopback server that answers to a public name stands behind a proxy."""
        return self.require_login or not self.is_loopback or not all(map(is_loopback_name, self.allowed_hosts))


def is_loopback_name(host: str) -> bool:
    """Whether a host name or address, without port and brackets, can only mean this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

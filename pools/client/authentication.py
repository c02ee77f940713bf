"""Ray's token authentication, seen from a process that wants to connect: would Ray let it in?

Whether there is a token, and which, Ray decides once per process from RAY_AUTH_MODE, RAY_AUTH_TOKEN,
RAY_AUTH_TOKEN_PATH and ~/.ray/auth_token. A process that Ray refuses tries for 20 s before it says so (Ray 2.60); so
the GCS is asked one cheap question first, with the very credentials that Ray would send.
"""

from __future__ import annotations

import os

from ..errors import Unreachable

_ASK_S = 5.0


def check_token(address: str) -> None:
    """Raises Unreachable, with Ray's own words, if the cluster at host:port refuses this process.

    Where Ray can't be asked so (another version of Ray, TLS), nothing is said: connecting will tell.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return
    try:
        import grpc  # type: ignore[import-untyped, unused-ignore]
        from ray._private.authentication import grpc_authentication_client_interceptor as credentials
        from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
    except ImportError:
        return
    options = [("grpc.enable_http_proxy", 0)]  # as Ray's own connections
    try:
        metadata = credentials._get_authentication_metadata_tuple()
        with grpc.insecure_channel(address, options) as channel:
            stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
            stub.CheckAlive(gcs_service_pb2.CheckAliveRequest(), timeout=_ASK_S, metadata=metadata)
    except grpc.RpcError as problem:
        if problem.code() == grpc.StatusCode.UNAUTHENTICATED:
            raise Unreachable(refused_by_ray(problem.details() or "unauthenticated", address)) from None
    except Exception as problem:  # noqa: BLE001 - private parts of Ray: what they raise is its own affair, but for this
        if "uthentication" in type(problem).__name__:
            raise Unreachable(refused_by_ray(problem, address)) from None


def refused_by_ray(problem: object, address: str = "") -> str:
    """One line for a process that Ray does not let in: Ray's words, what this process has, what would be right."""
    where = f" at {address}" if address else ""
    return (
        f"Ray{where} refused this process: {one_line(str(problem), 160)} (here {_credentials()}; set RAY_AUTH_MODE, and"
        " RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN, as the cluster has it)"
    )


def _credentials() -> str:
    mode = os.environ.get("RAY_AUTH_MODE")
    said = f"RAY_AUTH_MODE is {mode}" if mode else "RAY_AUTH_MODE is not set"
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        if os.environ.get(name):
            return f"{said}, with {name}"
    return said


def one_line(text: str, max_chars: int = 300) -> str:
    """The first line of somebody else's message, printable and not too long."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    first = "".join(char for char in (lines[0] if lines else "") if char.isprintable())
    return first if len(first) <= max_chars else first[: max_chars - 3] + "..."

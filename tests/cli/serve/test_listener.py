"""Taking a port: free, taken, forbidden, or on no address of ours."""

import socket

import pytest

from faser.cli.serve.listener import listen
from faser.errors import ConfigError


def test_port_0_is_any_free_one() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


def test_a_second_server_on_a_port_is_refused_before_it_loads_anything() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"--port is {port}; 127.0.0.1:{port} cannot be used: Address already"
        ):
            listen("127.0.0.1", port)


def test_a_port_is_free_again_right_after_a_connection_ended() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        served, _ = listener.accept()
        served.close()
        client.close()
    listen("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=host):
        listen(host, 0)

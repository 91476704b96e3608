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
        with pytest.raises(ConfigError) as caught:
            listen("127.0.0.1", port)
    assert str(caught.value) == (
        f"--port is {port}; 127.0.0.1:{port} cannot be used: Address already in use; stop the program that uses "
        f"it, or choose another port, such as --port {port + 1}"
    )


def test_a_port_is_free_again_right_after_a_connection_ended() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        served, _ = listener.accept()
        served.close()
        client.close()
    listen("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_that_is_not_ours_is_named_and_the_port_is_not_blamed(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--host is {host}; it must be an address of this machine") as caught:
        listen(host, 8123)
    assert "--port" not in str(caught.value)

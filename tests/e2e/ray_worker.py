"""What Ray starts for a worker on the instance of `ray_instance`: it asks there for a fork. It imports little."""

import os
import socket
import sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(os.environ["TRIVIUM_RAY_WORKERS"])
    request = repr((os.getcwd(), sys.argv[1:], dict(os.environ)))
    socket.send_fds(server, [request.encode()], [0, 1, 2])

"""The front of a server: the only process that clients reach. It never imports TensorFlow.

    clients -> http_connection.py -> desk.py -> dispatcher.py -> workers
                                       |  interfaces say what is asked for

- `waiting_line.py`: what waits for a worker. `costs.py`: how long that will be.
- `fleet.py`: the workers, and new ones for new versions. `serving_worker.py`: one of them.
- `wanted_models.py`: which models that are, by the last look at the disk.
- `leftovers.py`: deletes the files of versions that no worker has.
- `server.py`: all of it in one process, from its start to SIGTERM. `counters.py`: its metrics.
"""

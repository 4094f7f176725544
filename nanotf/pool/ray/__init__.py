"""Workers as Ray actors: Ray does placement, scheduling and the life of remote processes.

    parent                          node of a Ray cluster
      Pool                            Relay, an actor, holds the node's cores (num_cpus)
        RayCrew ---- actor calls --->   starts `nanotf.worker`, as a pool does
        RayWorker                       (pinning, log, crashes, death with the parent: the same)

Where the actor runs on the parent's node, it hands the worker's channel and log to the parent
over a Unix socket, and has nothing more to do with what they say to each other: shared memory is
shared, transport "shm" works, nothing is slower than with local workers.

On another node the actor stands between the two (`bridge` in the parent, `relay` there). Messages
go through actor calls. Each shared block has a twin on the node; what one side has written, and
its message says so, is copied to the other's before the message is delivered.

Neither side opens a port; Ray's ports, and who may use them, are Ray's.
"""

"""Workers as Ray actors: Ray places, schedules and supervises remote processes.

    parent                          node of a Ray cluster
      Pool                            Relay, an actor, holds the node's cores (num_cpus)
        RayCrew ---- actor calls --->   starts `nanotf.worker`, as a pool does
        RayWorker                       (pinning, log, crashes, death with the parent: the same)

An actor on the parent's node hands the worker's channel and log to the parent over a Unix socket,
and takes no further part in their communication. Shared memory is shared, transport "shm" works,
and nothing is slower than with local workers.

An actor on another node connects the two (`bridge` in the parent, `relay` on the node). Messages
go through actor calls. Each shared block has a twin on the node. A message lists the parts of
blocks that its sender has written; these are copied to the twins before the message is delivered.

Neither side opens a port. Ray's own ports, and access to them, are configured in Ray.
"""

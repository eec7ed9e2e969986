"""KV that outlives the process: full blocks go to files between steps, and come back when a prompt asks for them.

    engine thread                                  threads of this package
    a request ended ──> Saver copies blocks ─────> Writer: checksum, temp file, fsync, rename, size limit
    a request came  ──> Loader <──────────────── pool of readers: read, verify; the request waits, others run

`KvDisk` (disk.py) is what the engine sees. Nothing here decides who holds a block: loaded blocks enter through a `BlockTable`,
as if they had been computed.
"""

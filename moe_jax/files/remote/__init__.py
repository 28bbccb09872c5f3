"""What is beneath `StoragePath` for buckets of an object store, by addresses such as `gs://bucket/models/moe`.

Where a local disk renames what is finished, a bucket cannot: what a command makes is written in its final place, and a
file without which it counts for nothing (config.json of a model) is written last. Everything goes through TensorStore's
client, which Orbax uses for the arrays of checkpoints too: one way to log in, to try again, to ask for a range of
bytes, and to write only over what one has seen.

All of this was tested with a server in the tests that speaks the protocol of Google Cloud Storage, lists late and fails
when it is told to, and never with Google's own.

    address    which paths are addresses, and of what
    objects    reading, writing and listing the objects of a bucket, in bounded time
    lease      who works in a place, where nothing can be locked
    remote_work  work that goes on after a kill
    epath_backend  addresses for Orbax, which asks `etils.epath`
    traffic    bytes that were read and written, here and on local disks
"""

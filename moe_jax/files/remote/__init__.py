"""The layer beneath `StoragePath` for buckets of an object store, with addresses such as `gs://bucket/models/moe`.

On a local disk finished files are renamed; in a bucket this is impossible. There a command writes its files in their
final place, and writes last the file without which the others count for nothing (config.json of a model). Everything
goes through TensorStore's client, which Orbax uses for the arrays of checkpoints too: one way to log in, to retry, to
ask for a range of bytes, and to overwrite only the version that was read.

All of this was tested against a server in the tests that speaks the protocol of Google Cloud Storage, lists late and
fails when it is told to, and never against Google's own.

    address    addresses: which paths are addresses, and their parts
    objects    reading, writing and listing the objects of a bucket, in bounded time
    lease      leases: which process works in a place, since nothing can be locked
    remote_work  work that goes on after a kill
    epath_backend  addresses for Orbax, which asks `etils.epath`
    traffic    bytes that were read and written, here and on local disks
"""

"""Work on a single file that goes on after a kill: it is made in a folder beside its place, and moved there whole."""

from moe_jax.files.staging import Workplace, refuse_existing
from moe_jax.files.storage_path import StoragePath


class FileWorkplace(Workplace):
    """A `Workplace` whose target is a file: the one of the same name in the folder."""

    @property
    def file(self) -> StoragePath:
        """The file that will be the target."""
        return self.folder / self._target.name

    def complete(self) -> None:
        """Moves the file to the target; raises `InputError` if something has appeared there."""
        self._refuse_existing()
        self.file.rename(self._target)
        self._target.parent.sync()
        self._completed = True
        self.folder.remove_tree()

    def _refuse_existing(self) -> None:
        refuse_existing(self._target, file=True)

"""What a start leaves in memory."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

from syncer.launch import launch
from syncer.options import worker_timeouts
from tests.checkpoint.builders import cut, started
from tests.syncer.shell.parsing import parse


def test_c87_a_taken_checkpoint_is_nobody_elses(tmp_path: Path) -> None:
    store = started(tmp_path / "P")
    store.save(cut(3), patch=False, last=False)
    store.release()
    options = parse("--checkpoint-path", str(tmp_path / "P"), "--resume")
    launched = launch(options, worker_timeouts(os.environ))
    with launched.cleanup:
        assert launched.resumption is not None
        assert launched.resumption.step == 3
        assert launched.resumption.verified
        resumed = launched.take_resumed()
        assert resumed is not None
        watched = weakref.ref(resumed.fragments[0].params)
        assert launched.take_resumed() is None
        del resumed
        gc.collect()
        assert watched() is None

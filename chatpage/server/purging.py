"""What was deleted leaves for good after a while."""

import asyncio
import logging
import time

from chatpage.errors import StoreError
from chatpage.store import Store

DAY_S = 86_400.0
logger = logging.getLogger(__name__)


async def purge_daily(store: Store, keep_days: int) -> None:
    """Remove for good, now and once a day, what was deleted more than `keep_days` days ago; does not end by itself."""
    while True:
        before = int((time.time() - keep_days * DAY_S) * 1e6)
        try:
            purged = await store.purge_deleted.aio(before=before)
        except StoreError as error:
            logger.warning("What was deleted could not be removed for good; it is tried again in a day: %s", error)
        else:
            if purged.num_conversations or purged.num_nodes:
                logger.info("Removed for good: %d conversations, %d messages.", purged.num_conversations, purged.num_nodes)
        await asyncio.sleep(DAY_S)

"""Random numbers that depend on nothing but (seed, sample, position).

Invariant: `uniform` is a pure function of its three integers. No generator has a state, so a sample cannot notice its batch
mates, the order of rows, a preemption, or how many siblings it has: sample 3 of 8 is sample 3 of 4.

Why a hash and not Philox: choosing a token by inverting the distribution takes one number a token, so there is no stream to
fill. BLAKE2b from the standard library costs about 1 us, mixes every bit of its input, gives the same bits on every platform
and device, and needs no code of ours to get right.
"""

import secrets
import struct
from hashlib import blake2b

from chatpage.sampling_params import MAX_SEED

_LAYOUT = struct.Struct("<QQ")
_PERSON = b"chatpage.sample"  # keeps these numbers apart from any other use of the same seed


def uniform(seed: int, sample: int, position: int) -> float:
    """Return the number in [0, 1), a multiple of 2**-53, that chooses one token.

    Args:
        seed: Seed of the request, in [0, 2**63).
        sample: Index of the sample in its request.
        position: Index of the token in the whole sequence, prompt included.
    """
    key = seed.to_bytes(8, "little")
    digest = blake2b(_LAYOUT.pack(sample, position), digest_size=8, key=key, person=_PERSON).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw_seed() -> int:
    """Draw a seed for a request that names none; the operating system's randomness, so that two runs differ."""
    return secrets.randbelow(MAX_SEED + 1)

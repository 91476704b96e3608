// Which tiles a process computes with: those of the hardware where they work, else emulated ones, which give the same
// bits.

#include <cstdint>

#include "tiles.h"

#if defined(FASER_TILES)

#include <csetjmp>
#include <csignal>
#include <sys/syscall.h>
#include <unistd.h>

#include "tile_product.h"

namespace faser {

TileKind tile_kind = kEmulatedTiles;

namespace {

enum Trial : int32_t { kWorks = 0, kRefused = 1, kFaults = 2, kDiffers = 3 };

sigjmp_buf back;
void on_fault(int) { siglongjmp(back, 1); }

// Linux gives the state of tiles to processes that ask. Threads have it too, those that run already and those to come.
bool is_permitted() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0; }

struct Operands {
    alignas(64) uint16_t x[kTilesRows * 32];
    alignas(64) uint16_t w[2 * 16 * 32];
};

template <class Tiles>
void multiply_once(const Operands& by, float* sums) {
    const TileScope<Tiles> scope(product_tiles(kTilesRows));
    const auto at = [&](int p, int64_t) { return (const char*)by.w + p * 1024; };
    multiply_tiles<Tiles>(TileOperands{(const char*)by.x, 64, at, 64}, kTilesRows, 2, 1, sums, 32, false);
}

// One product by the hardware. A processor or a hypervisor that says it has tiles and has none raises SIGILL.
Trial try_hardware() {
    if (!is_permitted()) return kRefused;
    Operands by;
    for (int i = 0; i < kTilesRows * 32; i++) by.x[i] = uint16_t(0x3f80 + i * 37 % 120 + (i % 3 ? 0 : 0x8000));
    for (int i = 0; i < 2 * 16 * 32; i++) by.w[i] = uint16_t(0x3f80 + i * 53 % 120 + (i % 5 ? 0 : 0x8000));
    alignas(64) static float found[kTilesRows * 32], wanted[kTilesRows * 32];
    struct sigaction ours = {}, before;
    ours.sa_handler = on_fault;
    sigaction(SIGILL, &ours, &before);
    volatile bool faulted = true;
    if (sigsetjmp(back, 1) == 0) {
        multiply_once<HardwareTiles>(by, found);
        faulted = false;
    }
    sigaction(SIGILL, &before, nullptr);
    if (faulted) return kFaults;
    multiply_once<EmulatedTiles>(by, wanted);
    return std::memcmp(found, wanted, sizeof(found)) == 0 ? kWorks : kDiffers;
}

}  // namespace
}  // namespace faser

extern "C" {

// Tiles of this kind from now on; those of the hardware are tried first. Returns 0, or why they are emulated: 1 the
// system refuses them, 2 they fault, 3 they compute something else.
int32_t faser_use_tiles(int32_t kind) {
    const auto trial = kind == faser::kHardwareTiles ? faser::try_hardware() : faser::kWorks;
    faser::tile_kind = trial == faser::kWorks ? faser::TileKind(kind) : faser::kEmulatedTiles;
    return trial;
}
}

#else

extern "C" {

// Kernels of other instruction sets have no tiles.
int32_t faser_use_tiles(int32_t) { return -1; }
}

#endif

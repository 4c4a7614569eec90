#include "cpu.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#endif

namespace trioengine {
namespace {

#if defined(__x86_64__)

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  if (__get_cpuid_max(0, nullptr) < leaf) return r;
  __cpuid_count(leaf, subleaf, r.a, r.b, r.c, r.d);
  return r;
}

bool has(unsigned value, int bit) { return (value >> bit & 1u) != 0; }

// State components that the operating system saves (XCR0).
std::uint64_t saved_state() {
  if (!has(cpuid(1, 0).c, 27)) return 0;  // OSXSAVE
  std::uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

bool has_avx2() {
  const Registers one = cpuid(1, 0), seven = cpuid(7, 0);
  return (saved_state() & 0x6) == 0x6 && has(one.c, 12) && has(one.c, 29) && has(seven.b, 5);
}

bool has_avx512() {
  const Registers seven = cpuid(7, 0);
  return has_avx2() && (saved_state() & 0xe6) == 0xe6 && has(seven.b, 16) && has(seven.b, 17) &&
         has(seven.b, 30) && has(seven.b, 31);
}

bool has_avx512_bf16() {
  return has_avx512() && has(cpuid(7, 0).c, 11) && has(cpuid(7, 1).a, 5);
}

// Linux hands out tile state on request only, once per process.
bool request_tiles() {
  constexpr int kArchReqXcompPerm = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
}

bool has_amx() {
  const Registers seven = cpuid(7, 0);
  return has_avx512_bf16() && (saved_state() & 0x60000) == 0x60000 && has(seven.d, 22) &&
         has(seven.d, 24) && has(seven.d, 25) && request_tiles();
}

// With vdpbf16ps at full rate (AMD) bf16 pairs win; Intel's takes two cycles on one port, and
// float FMA on widened weights is twice as fast there (measured on Sapphire Rapids and later).
bool bf16_pays() {
  const Registers zero = cpuid(0, 0);
  return zero.b != 0x756e6547u;  // not "Genu"ineIntel
}

#endif

bool add(std::vector<const KernelTable*>* tables, const KernelTable* table) {
  if (table != nullptr) tables->push_back(table);
  return table != nullptr;
}

}  // namespace

std::vector<const KernelTable*> usable_kernels() {
  std::vector<const KernelTable*> tables;
#if defined(__x86_64__)
  if (has_amx()) add(&tables, amx_kernels());
  const bool bf16_first = bf16_pays();
  if (bf16_first && has_avx512_bf16()) add(&tables, avx512_bf16_kernels());
  if (has_avx512()) add(&tables, avx512_kernels());
  if (!bf16_first && has_avx512_bf16()) add(&tables, avx512_bf16_kernels());
  if (has_avx2()) add(&tables, avx2_kernels());
#endif
  add(&tables, portable_kernels());
  return tables;
}

const KernelTable& choose_kernels(const std::string& name) {
  const std::vector<const KernelTable*> tables = usable_kernels();
  if (name.empty()) return *tables.front();
  std::string names;
  for (const KernelTable* table : tables) {
    if (name == table->name) return *table;
    names += (names.empty() ? "" : ", ") + std::string(table->name);
  }
  throw std::invalid_argument("isa \"" + name + "\" cannot be used here; usable: " + names);
}

}  // namespace trioengine

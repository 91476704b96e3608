// Finding contexts in text. Oracle: tests/engine/execution/drafting/oracle/corpus.py, with lists and dicts.

#include "text.h"

#include <algorithm>

using namespace faser;

namespace {

constexpr uint64_t kMix = 0x9e3779b97f4a7c15ull;
constexpr int64_t kCompactAbove = 4096;  // forgotten tokens are cut off in pieces no smaller than this
constexpr size_t kFewest = 64;           // entries of a table

uint64_t stir(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * kMix;
    return hash ^ (hash >> 32);
}

bool same(const int32_t* one, const int32_t* other, int64_t length) { return std::equal(one, one + length, other); }

}  // namespace

namespace faser {

Lengths::Lengths(bool chained, int low, int high) {
    for (int length = 1; length <= std::max(high, chained ? kAnchors[0] : 0); length++) {
        const int* found = std::find(kAnchors, kAnchors + kNumAnchors, length);
        const int number = chained && found < kAnchors + kNumAnchors ? int(found - kAnchors) : -1;
        if (number < 0 && (length < low || length > high)) continue;
        of.push_back(length);
        anchor.push_back(number);
    }
}

int Lengths::find(int length) const { return int(std::find(of.begin(), of.end(), length) - of.begin()); }

int context_keys(const Lengths& lengths, const int32_t* context_end, int64_t available, uint64_t salt, uint64_t* keys) {
    uint64_t hash = salt;
    int at = 0;
    for (int length = 1; at < int(lengths.of.size()) && length <= available; length++) {
        hash = stir(hash, uint32_t(context_end[-length]));
        if (lengths.of[at] == length) keys[at++] = stir(hash, uint64_t(length));
    }
    return at;
}

int64_t Table::find(uint64_t key) const {
    if (entries_.empty()) return kNowhere;
    const size_t mask = entries_.size() - 1;
    for (size_t at = key & mask;; at = (at + 1) & mask) {
        if (entries_[at].position == kNowhere) return kNowhere;
        if (entries_[at].key == key) return entries_[at].position;
    }
}

int64_t Table::put(uint64_t key, int64_t position) {
    if ((used_ + 1) * 4 > entries_.size() * 3) grow();
    const size_t mask = entries_.size() - 1;
    for (size_t at = key & mask;; at = (at + 1) & mask) {
        Entry& entry = entries_[at];
        if (entry.position == kNowhere) {
            entry = {key, position};
            used_++;
            return kNowhere;
        }
        if (entry.key == key) {
            const int64_t before = entry.position;
            entry.position = position;
            return before;
        }
    }
}

// The hole is filled with the next entry that may lie there, and so on, until a probe ends at an empty one.
void Table::erase(uint64_t key) {
    const size_t mask = entries_.size() - 1;
    size_t hole = key & mask;
    while (entries_[hole].key != key || entries_[hole].position == kNowhere) hole = (hole + 1) & mask;
    for (size_t at = (hole + 1) & mask; entries_[at].position != kNowhere; at = (at + 1) & mask) {
        const size_t home = entries_[at].key & mask;
        if (((at - home) & mask) >= ((at - hole) & mask)) {
            entries_[hole] = entries_[at];
            hole = at;
        }
    }
    entries_[hole].position = kNowhere;
    used_--;
}

bool Table::agrees(const Table& cold) const {
    const size_t mask = entries_.size() - 1;
    size_t used = 0;
    for (const Entry& entry : entries_) used += entry.position != kNowhere;
    if (used != cold.used_) return false;
    for (const Entry& entry : cold.entries_) {
        if (entry.position == kNowhere) continue;
        size_t at = entry.key & mask, tried = 0;
        while (entries_[at].position != kNowhere && entries_[at].key != entry.key && ++tried < entries_.size()) {
            at = (at + 1) & mask;
        }
        if (entries_[at].key != entry.key || entries_[at].position != entry.position) return false;
    }
    return true;
}

void Table::grow() {
    std::vector<Entry> old(std::max(kFewest, 2 * entries_.size()), Entry{0, kNowhere});
    old.swap(entries_);
    const size_t mask = entries_.size() - 1;
    for (const Entry& entry : old) {
        if (entry.position == kNowhere) continue;
        size_t at = entry.key & mask;
        while (entries_[at].position != kNowhere) at = (at + 1) & mask;
        entries_[at] = entry;
    }
}

int64_t Text::index(const Lengths& lengths, int64_t begin, uint64_t salt, int64_t most) {
    const int num_lengths = int(lengths.of.size());
    const int64_t count = std::min(most, end() - indexed);
    std::vector<uint64_t> keys(num_lengths);
    for (const int64_t last = indexed + count; indexed < last; indexed++) {
        const int32_t* context_end = tokens.data() + (indexed - dropped);
        const int found = context_keys(lengths, context_end, indexed - begin, salt, keys.data());
        for (int i = 0; i < num_lengths; i++) {
            const int64_t before = i < found ? latest.put(keys[i], indexed) : kNowhere;
            if (lengths.anchor[i] >= 0) previous[lengths.anchor[i]].push_back(before);
        }
    }
    return count;
}

// The index of the first position that is scanned for contexts of this length.
int64_t Text::first_scanned(int64_t length) const {
    return std::max({length, indexed - dropped, int64_t(tokens.size()) - kScanned});
}

void Text::close() {
    tokens.push_back(kEnd);
    for (auto& chain : previous) chain.push_back(kNowhere);
    indexed = end();
}

void Text::forget(const Lengths& lengths, int64_t num_tokens, uint64_t salt) {
    const int64_t after = oldest + num_tokens + 1;
    std::vector<uint64_t> keys(lengths.of.size());
    for (int64_t position = oldest; position < after - 1; position++) {
        const int32_t* context_end = tokens.data() + (position - dropped);
        const int found = context_keys(lengths, context_end, position - oldest, salt, keys.data());
        for (int i = 0; i < found; i++) {
            const int64_t last = latest.find(keys[i]);
            if (last != kNowhere && last < after) latest.erase(keys[i]);
        }
    }
    oldest = after;
    const int64_t forgotten = after - dropped;
    if (forgotten > std::max(kCompactAbove, int64_t(tokens.size()) / 2)) {
        tokens.erase(tokens.begin(), tokens.begin() + forgotten);
        for (auto& chain : previous) chain.erase(chain.begin(), chain.begin() + forgotten);
        dropped = after;
    }
}

bool Text::find(const Lengths& lengths, const int32_t* tail, int64_t tail_length, const uint64_t* keys,
                Match& match) const {
    for (int a = 0; a < kNumAnchors; a++) {
        const int length = kAnchors[a];
        if (length > tail_length) continue;
        int64_t starts[kOccurrences];
        int count = 0;
        const int32_t* context = tail + tail_length - length;
        const int64_t first = first_scanned(length);
        for (int64_t at = int64_t(tokens.size()) - 1; at >= first && count < kOccurrences; at--) {
            if (same(tokens.data() + at - length, context, length)) starts[count++] = at;
        }
        for (int64_t position = latest.find(keys[lengths.find(length)]);
             position >= oldest && position != kNowhere && count < kOccurrences;) {
            starts[count++] = position - dropped;
            position = previous[a][position - dropped];
        }
        if (longest(tail, tail_length, starts, count, length, match)) return true;
    }
    return false;
}

bool Text::longest(const int32_t* tail, int64_t tail_length, const int64_t* starts, int count, int64_t length,
                   Match& match) const {
    match.count = 0;
    const int32_t* tail_end = tail + tail_length;
    for (int i = 0; i < count; i++) {
        const int64_t start = starts[i];
        const int32_t* context_end = tokens.data() + start;
        if (start < length || !same(context_end - length, tail_end - length, length)) continue;
        int64_t longer = length;
        while (longer < std::min(tail_length, start) && context_end[-longer - 1] == tail_end[-longer - 1]) longer++;
        if (longer > length) {
            length = longer;
            match.count = 0;
        }
        match.starts[match.count++] = start;
    }
    match.length = length;
    return match.count > 0;
}

int64_t Text::find_last(const Lengths& lengths, int length, const uint64_t* keys) const {
    const int64_t size = int64_t(tokens.size());
    if (size < length) return -1;
    const int32_t* context = tokens.data() + size - length;
    for (int64_t at = size - 1, first = first_scanned(length); at >= first; at--) {
        if (same(tokens.data() + at - length, context, length)) return at;
    }
    const int64_t at = latest.find(keys[lengths.find(length)]);
    return at != kNowhere && same(tokens.data() + at - length, context, length) ? at : -1;
}

bool Text::agrees(const Text& cold) const {
    if (indexed != cold.indexed || !latest.agrees(cold.latest)) return false;
    for (int a = 0; a < kNumAnchors; a++) {
        if (previous[a].size() != cold.previous[a].size() + size_t(cold.dropped - dropped)) return false;
        for (size_t at = 0; at < cold.previous[a].size(); at++) {
            const int64_t before = previous[a][at + size_t(cold.dropped - dropped)];
            if ((before < oldest ? kNowhere : before) != cold.previous[a][at]) return false;
        }
    }
    return true;
}

size_t Text::bytes() const {
    size_t sum = sizeof(Text) + tokens.capacity() * sizeof(int32_t) + latest.bytes();
    for (const auto& chain : previous) sum += chain.capacity() * sizeof(int64_t);
    return sum;
}

}  // namespace faser

// Text that finds where its current context occurred before.
//
// For contexts of a few lengths a table has the latest position right after each; for two of them, the anchors, a chain
// leads from every position to the previous one with the same context. A position is where a continuation begins:
//
//     tokens      ... a b c [d] ... a b c [d] ... a b c |     the context a b c ends the text and occurred twice
//     chain                 ^___________|  ^_______ latest

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace faser {

constexpr int kAnchors[] = {5, 2};     // longest first: a long context finds the few occurrences worth comparing
constexpr int kNumAnchors = 2;
constexpr int kOccurrences = 8;        // the latest ones that are compared and counted
constexpr int64_t kScanned = 4096;     // positions, at most
constexpr int64_t kNowhere = -1;       // before every position
constexpr int32_t kEnd = -1;           // follows each text of a corpus; not a token id

// The context lengths that a text is indexed by, ascending, and which of them is which anchor (-1: none).
struct Lengths {
    std::vector<int> of;
    std::vector<int> anchor;

    // The anchors if chained, and every length from low to high; none where high is 0.
    Lengths(bool chained, int low, int high);
    int find(int length) const;  // its index
};

// Keys of the contexts that end right before `context_end`, one for each length of at most `available` tokens.
// Equal contexts of equal salt have equal keys; where a token depends on a key, the contexts are compared too.
int context_keys(const Lengths& lengths, const int32_t* context_end, int64_t available, uint64_t salt, uint64_t* keys);

// Position by key, with open addressing. kNowhere: the key is absent.
class Table {
public:
    int64_t find(uint64_t key) const;
    // Begin to load where a key is.
    void prefetch(uint64_t key) const {
        if (!entries_.empty()) __builtin_prefetch(&entries_[key & (entries_.size() - 1)]);
    }
    int64_t put(uint64_t key, int64_t position);  // returns the position before
    void erase(uint64_t key);
    bool agrees(const Table& cold) const;  // holds what that one does, which is sound; this may be damaged
    size_t bytes() const { return entries_.capacity() * sizeof(Entry); }

private:
    struct Entry {
        uint64_t key;
        int64_t position;
    };
    void grow();

    std::vector<Entry> entries_;  // a power of two of them
    size_t used_ = 0;
};

// Occurrences of the longest context found. starts: indices into the tokens, the latest first.
struct Match {
    int64_t length = 0;
    int count = 0;
    int64_t starts[kOccurrences];
};

// Tokens that grow at the end, and are forgotten at the front if at all. tokens begins at position dropped.
// A look-up finds positions that are indexed, and scans up to kScanned of those that are not, the latest ones.
struct Text {
    std::vector<int32_t> tokens;
    int64_t dropped = 0;
    int64_t oldest = 0;   // position of the oldest text not forgotten
    int64_t indexed = 0;  // positions before it are indexed
    Table latest;
    std::vector<int64_t> previous[kNumAnchors];

    int64_t end() const { return dropped + int64_t(tokens.size()); }
    // Index up to `most` appended positions and return how many. begin: no context starts before it.
    int64_t index(const Lengths& lengths, int64_t begin, uint64_t salt, int64_t most);
    // End the newest text: an END follows it. All tokens before it are indexed.
    void close();
    // Drop the oldest text, of num_tokens and its END.
    void forget(const Lengths& lengths, int64_t num_tokens, uint64_t salt);
    // Where the longest suffix of the tail occurred, among the latest occurrences of its longest anchor. keys: of the
    // tail's contexts, with this text's salt.
    bool find(const Lengths& lengths, const int32_t* tail, int64_t tail_length, const uint64_t* keys,
              Match& match) const;
    // The latest index that comes right after tokens equal to the last `length` ones; -1: none.
    int64_t find_last(const Lengths& lengths, int length, const uint64_t* keys) const;
    size_t bytes() const;
    // Whether the index is that of a text that was indexed anew. What was forgotten does not count.
    bool agrees(const Text& cold) const;

private:
    int64_t first_scanned(int64_t length) const;
    bool longest(const int32_t* tail, int64_t tail_length, const int64_t* starts, int count, int64_t length,
                 Match& match) const;
};

}  // namespace faser

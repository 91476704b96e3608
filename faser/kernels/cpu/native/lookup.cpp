// Drafts copied from text: what most often followed the longest context, here and in past outputs (suffix), and what
// followed the last few tokens the last time (n-gram); and chains of an n-gram model (ngrams.h). Many texts at once, all
// in the caller's thread.
//
// Oracles: suffix.py, ngram.py and ngram_model.py in tests/engine/execution/drafting/oracle. Confidences are the same
// doubles: the same operations in the same order, none of them fused.

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "arrays.h"
#include "lookup.h"
#include "ngrams.h"
#include "text.h"

using namespace faser;

namespace {

constexpr int64_t kAhead = 4;             // texts that are loaded while one is looked up
constexpr double kDoubt = 3.0;            // tokens of context that make one occurrence an even bet
constexpr int64_t kShortestOutput = 8;    // shorter outputs hold nothing that a request would repeat

enum Status : int32_t { kFine = 0, kNoText = 1, kNoToken = 2 };

}  // namespace

extern "C" {

// What to draft, and how much to remember. depth 0: no suffix drafts. max_n 0: no n-gram drafts. chunk: most positions
// that a call indexes. max_bytes: texts that hold more are not indexed further. seed: of the keys. ngrams: a model that
// outlives the texts; null: no drafts by one.
struct FaserTextRules {
    int64_t cap, depth, max_outputs, max_tokens, min_n, max_n, chunk, max_bytes;
    double factor, min_share;
    uint64_t seed;
    const FaserNgrams* ngrams;
};
}

namespace {

// Tokens expected to be accepted, the sum of the running products of probs, is the score.
struct Path {
    std::vector<int32_t> tokens;
    std::vector<double> probs;
    double score;
};

// One text. unsaid: index of the first token that the corpus lacks.
struct Sequence {
    Text text;
    int64_t unsaid;
    uint64_t salt;
};

struct Output {
    int64_t num_tokens;
    uint64_t salt;
};

// Outputs of finished texts, the oldest forgotten first.
struct Corpus {
    Lengths lengths{true, 0, 0};
    Text text;
    std::deque<Output> outputs;
    int64_t num_tokens = 0;

    void add(const FaserTextRules& rules, const int32_t* tokens, int64_t count, uint64_t salt) {
        const int64_t kept = std::min(count, rules.max_tokens);
        if (kept < kShortestOutput || rules.max_outputs == 0) return;
        while (num_tokens + kept > rules.max_tokens || int64_t(outputs.size()) == rules.max_outputs) {
            text.forget(lengths, outputs.front().num_tokens, outputs.front().salt);
            num_tokens -= outputs.front().num_tokens;
            outputs.pop_front();
        }
        const int64_t begin = text.end();
        text.tokens.insert(text.tokens.end(), tokens + count - kept, tokens + count);
        text.index(lengths, begin, salt, kept);
        text.close();
        outputs.push_back({kept, salt});
        num_tokens += kept;
    }

    // The outputs that are not forgotten, indexed anew.
    Text cold() const {
        Text found;
        found.dropped = found.oldest = found.indexed = text.oldest;
        const int32_t* tokens = text.tokens.data() + (text.oldest - text.dropped);
        for (const Output& each : outputs) {
            const int64_t begin = found.end();
            found.tokens.insert(found.tokens.end(), tokens, tokens + each.num_tokens);
            found.index(lengths, begin, each.salt, each.num_tokens);
            found.close();
            tokens += each.num_tokens + 1;
        }
        return found;
    }
};

// From the occurrences of a context on, always the token that follows most often, in a tie the latest. An occurrence at
// the end of a text has no following token and is not counted. drafted: the draft is appended to it.
void follow(const FaserTextRules& rules, const std::vector<int32_t>& tokens, Match& match, int64_t limit,
            std::vector<int32_t>& drafted, Path& path) {
    const double most = rules.factor * double(match.length);
    const int64_t last = match.length + (most < double(limit) ? int64_t(most) : limit);
    double survival = 1.0;
    for (int64_t context = match.length; context < last; context++) {
        int num_starts = 0;
        for (int i = 0; i < match.count; i++) {
            if (tokens[match.starts[i]] != kEnd) match.starts[num_starts++] = match.starts[i];
        }
        if (num_starts == 0) break;
        int32_t token = 0;
        int count = 0;
        for (int i = 0; i < num_starts && count < num_starts - i; i++) {
            const int32_t candidate = tokens[match.starts[i]];
            int seen = 0;
            for (int j = i; j < num_starts; j++) seen += tokens[match.starts[j]] == candidate;
            if (seen > count) {
                token = candidate;
                count = seen;
            }
        }
        if (count < rules.min_share * num_starts) break;
        match.count = 0;
        for (int i = 0; i < num_starts; i++) {
            if (tokens[match.starts[i]] == token) match.starts[match.count++] = match.starts[i] + 1;
        }
        const double prob = count / (num_starts + kDoubt / double(context));
        drafted.push_back(token);
        path.tokens.push_back(token);
        path.probs.push_back(prob);
        survival *= prob;
        path.score += survival;
    }
}

bool names_tokens(const int32_t* tokens, int64_t count) {
    return std::all_of(tokens, tokens + count, [](int32_t token) { return token >= 0; });
}

}  // namespace

// All texts of an engine, by number, and the outputs of those that have ended.
struct FaserTexts {
    FaserTextRules rules;
    Lengths lengths;
    std::vector<std::unique_ptr<Sequence>> sequences;
    Corpus corpus;
    std::vector<uint64_t> keys;
    std::vector<int32_t> tail;
    std::vector<int32_t> unseen;  // scratch for drafts from the corpus
    Path own, other;

    explicit FaserTexts(const FaserTextRules& given)
        : rules(given),
          lengths(given.depth > 0, int(given.min_n), int(given.max_n)),
          keys(lengths.of.size() + kNumAnchors) {}

    Sequence* at(int64_t number) {
        return number >= 0 && number < int64_t(sequences.size()) ? sequences[number].get() : nullptr;
    }

    // Index up to a chunk of the positions that are not, the texts in turn.
    void index() {
        if (lengths.of.empty()) return;
        int64_t left = rules.chunk;
        for (const auto& each : sequences) {
            if (each == nullptr || each->text.indexed == each->text.end()) continue;
            if (left == rules.chunk && bytes() >= size_t(rules.max_bytes)) return;
            left -= each->text.index(lengths, 0, rules.seed, left);
            if (left == 0) return;
        }
    }

    // Index a text anew and take that index where it differs. The corpus: number -1. Whether it did.
    bool rebuild(int64_t number) {
        Text* text = number < 0 ? &corpus.text : at(number) ? &at(number)->text : nullptr;
        if (text == nullptr) return false;
        Text cold;
        if (number < 0) {
            cold = corpus.cold();
        } else {
            cold.tokens = text->tokens;
            cold.index(lengths, 0, rules.seed, text->indexed);
        }
        if (text->agrees(cold)) return false;
        *text = std::move(cold);
        return true;
    }

    size_t bytes() const {
        size_t sum = sizeof(FaserTexts) + corpus.text.bytes() + corpus.outputs.size() * sizeof(Output);
        for (const auto& each : sequences) sum += each == nullptr ? 0 : sizeof(Sequence) + each->text.bytes();
        return sum;
    }

    // The better of a draft from the text itself and one from the corpus; in a tie the former.
    const Path& suffix(Sequence& each, int64_t limit) {
        Text& text = each.text;
        const int64_t size = int64_t(text.tokens.size());
        tail.assign(text.tokens.end() - std::min(size, rules.depth), text.tokens.end());
        const int64_t tail_length = int64_t(tail.size());
        clear(own);
        clear(other);
        Match match;
        if (text.find(lengths, tail.data(), tail_length, keys.data(), match)) {
            follow(rules, text.tokens, match, limit, text.tokens, own);
            text.tokens.resize(size);
        }
        if (corpus.outputs.empty()) return own;
        context_keys(corpus.lengths, tail.data() + tail_length, tail_length, each.salt, keys.data());
        if (corpus.text.find(corpus.lengths, tail.data(), tail_length, keys.data(), match)) {
            unseen.clear();
            follow(rules, corpus.text.tokens, match, limit, unseen, other);
        }
        return other.score > own.score ? other : own;
    }

    // The tokens after the latest longest match, repeated where the text ends. Returns its length, 0: none.
    int ngram(const Text& text, int64_t limit, int64_t* out) {
        const int64_t size = int64_t(text.tokens.size());
        for (int n = int(rules.max_n); n >= rules.min_n; n--) {
            const int64_t begin = text.find_last(lengths, n, keys.data());
            if (begin < 0) continue;
            for (int64_t i = 0; i < limit; i++) out[i] = text.tokens[begin + i % (size - begin)];
            return n;
        }
        return 0;
    }

    void own_keys(const Text& text) {
        const int64_t size = int64_t(text.tokens.size());
        context_keys(lengths, text.tokens.data() + size, size, rules.seed, keys.data());
    }

    // Begin to load what the texts need that come a few after the one at `at`: their tables lie apart.
    void prefetch(const int64_t* numbers, int64_t num_texts, int64_t at) {
        if (at + 2 * kAhead < num_texts) __builtin_prefetch(&this->at(numbers[at + 2 * kAhead])->text);
        if (at + kAhead >= num_texts) return;
        const Text& text = this->at(numbers[at + kAhead])->text;
        own_keys(text);
        for (size_t i = 0; i < lengths.of.size() && i < text.tokens.size(); i++) text.latest.prefetch(keys[i]);
    }

    static void clear(Path& path) {
        path.tokens.clear();
        path.probs.clear();
        path.score = 0.0;
    }
};

namespace faser {

int64_t num_methods(const FaserTexts* texts) {
    const FaserTextRules& rules = texts->rules;
    return (rules.depth > 0) + (rules.max_n > 0) + (rules.ngrams != nullptr);
}

int32_t look_up(FaserTexts* texts, const int64_t* numbers, const int64_t* most, const int64_t* num_unverified,
                int64_t num_texts, const int32_t* unverified, int64_t width, int64_t* lengths, int64_t* tokens,
                double* confidences) {
    const FaserTextRules& rules = texts->rules;
    int64_t total = 0;
    for (int64_t i = 0; i < num_texts; i++) {
        if (texts->at(numbers[i]) == nullptr) return kNoText;
        total += num_unverified == nullptr ? 0 : num_unverified[i];
    }
    if (!names_tokens(unverified, total)) return kNoToken;
    for (int64_t i = 0; i < num_texts; i++) {
        if (num_unverified == nullptr) texts->prefetch(numbers, num_texts, i);
        Sequence& sequence = *texts->at(numbers[i]);
        Text& text = sequence.text;
        const size_t num_known = text.tokens.size();
        if (num_unverified != nullptr) {
            text.tokens.insert(text.tokens.end(), unverified, unverified + num_unverified[i]);
            unverified += num_unverified[i];
        }
        const int64_t limit = std::min({rules.cap, most[i], width});
        texts->own_keys(text);
        if (rules.ngrams != nullptr) {
            const int64_t line = ((rules.depth > 0) + (rules.max_n > 0)) * num_texts + i;
            const int64_t size = int64_t(text.tokens.size());
            lengths[line] = rules.ngrams->model.draft(text.tokens.data() + size, size, limit, tokens + line * width,
                                                      confidences + line * width);
        }
        if (rules.max_n > 0) {  // before suffix, which overwrites the keys
            const int64_t line = rules.depth > 0 ? num_texts + i : i;
            const int n = texts->ngram(text, limit, tokens + line * width);
            lengths[line] = n > 0 ? limit : 0;
            std::fill_n(confidences + line * width, lengths[line], double(n));
        }
        if (rules.depth > 0) {
            const Path& best = texts->suffix(sequence, limit);
            lengths[i] = int64_t(best.tokens.size());
            std::copy(best.tokens.begin(), best.tokens.end(), tokens + i * width);
            std::copy(best.probs.begin(), best.probs.end(), confidences + i * width);
        }
        text.tokens.resize(num_known);
    }
    return kFine;
}

}  // namespace faser

extern "C" {

FaserTexts* faser_texts_new(const FaserTextRules* rules) { return new FaserTexts(*rules); }

void faser_texts_free(FaserTexts* texts) { delete texts; }

// A new text under a number that has none.
int32_t faser_texts_open(FaserTexts* texts, int64_t number, const int32_t* tokens, int64_t count, int64_t unsaid,
                         uint64_t salt) {
    if (number < 0 || texts->at(number) != nullptr) return kNoText;
    if (!names_tokens(tokens, count)) return kNoToken;
    if (number >= int64_t(texts->sequences.size())) texts->sequences.resize(number + 1);
    auto sequence = std::make_unique<Sequence>();
    sequence->text.tokens.assign(tokens, tokens + count);
    sequence->unsaid = unsaid;
    sequence->salt = salt ^ texts->rules.seed;
    texts->sequences[number] = std::move(sequence);
    return kFine;
}

// Append to text numbers[i] the next counts[i] of the tokens, and index a chunk. All texts grow or, unless the result is
// kFine, none.
int32_t faser_texts_extend(FaserTexts* texts, const int64_t* numbers, const int64_t* counts, int64_t num_texts,
                           const int32_t* tokens) {
    int64_t total = 0;
    for (int64_t i = 0; i < num_texts; i++) {
        if (texts->at(numbers[i]) == nullptr) return kNoText;
        total += counts[i];
    }
    if (!names_tokens(tokens, total)) return kNoToken;
    for (int64_t i = 0; i < num_texts; i++) {
        auto& text = texts->at(numbers[i])->text;
        text.tokens.insert(text.tokens.end(), tokens, tokens + counts[i]);
        tokens += counts[i];
    }
    texts->index();
    return kFine;
}

// Free a text. Where there are suffix drafts, its tokens from unsaid on go into the corpus.
int32_t faser_texts_close(FaserTexts* texts, int64_t number) {
    Sequence* sequence = texts->at(number);
    if (sequence == nullptr) return kNoText;
    const auto& tokens = sequence->text.tokens;
    if (texts->rules.depth > 0) {
        texts->corpus.add(texts->rules, tokens.data() + sequence->unsaid,
                          int64_t(tokens.size()) - sequence->unsaid, sequence->salt);
    }
    texts->sequences[number].reset();
    return kFine;
}

// A draft for each text numbers[i], of at most most[i] tokens, the cap and the width. The next num_unverified[i] of the
// unverified tokens stand at the end of the text during this call; they are scanned, never indexed.
// lengths: [methods, num_texts], suffix first, then n-gram, then the n-gram model. tokens, confidences: [methods,
// num_texts, width]; what lies beyond the lengths is left as it was.
int32_t faser_texts_look(FaserTexts* texts, const int64_t* numbers, const int64_t* most, const int64_t* num_unverified,
                         int64_t num_texts, const int32_t* unverified, int64_t width, Array found_lengths,
                         Array found_tokens, Array found_confidences) {
    return look_up(texts, numbers, most, num_unverified, num_texts, unverified, width, ints(found_lengths),
                   ints(found_tokens), reals(found_confidences));
}

// Compare the index of a text with one made anew from its tokens, and take that where they differ. number -1: of the
// corpus. 1: they differed.
int32_t faser_texts_rebuild(FaserTexts* texts, int64_t number) { return texts->rebuild(number); }

// Tokens in the corpus.
int64_t faser_texts_remembered(const FaserTexts* texts) { return texts->corpus.num_tokens; }

// Bytes held.
int64_t faser_texts_bytes(const FaserTexts* texts) { return int64_t(texts->bytes()); }
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "talk.h"

#include <inttypes.h>

#include "util.h"

/* Those who caused a line last; of more than so many at once each begins anew, which bounds the lines all the same. */
#define TALKERS 64u
/* Who has used his burst up waits until so much of it is there again, lest every line be followed by a word about
 * others. */
#define ENOUGH (MOKD_TALK_BURST / 10)
#define LINE_NS (UINT64_C(1000000000) / MOKD_TALK_A_SECOND)

static struct talker {
    uid_t uid;
    uint64_t lines; /* that he may still cause */
    uint64_t at_ns; /* up to which lines were added; 0: nobody is here */
    uint64_t kept;
} talkers[TALKERS];

static struct talker *find(uid_t uid, uint64_t now_ns)
{
    struct talker *oldest = &talkers[0];

    for (size_t i = 0; i < TALKERS; i++) {
        if (talkers[i].at_ns && talkers[i].uid == uid)
            return &talkers[i];
        if (talkers[i].at_ns < oldest->at_ns)
            oldest = &talkers[i];
    }
    *oldest = (struct talker){ .uid = uid, .lines = MOKD_TALK_BURST, .at_ns = now_ns };
    return oldest;
}

static void add_lines(struct talker *talker, uint64_t now_ns)
{
    uint64_t lines = now_ns > talker->at_ns ? (now_ns - talker->at_ns) / LINE_NS : 0;

    talker->at_ns += lines * LINE_NS;
    talker->lines = lines < MOKD_TALK_BURST - talker->lines ? talker->lines + lines : MOKD_TALK_BURST;
}

bool mokd_talk_may_at(uid_t uid, uint64_t now_ns, uint64_t *ret_kept)
{
    struct talker *talker = find(uid, now_ns);

    add_lines(talker, now_ns);
    if (talker->lines == 0 || (talker->kept && talker->lines < ENOUGH)) {
        *ret_kept = talker->kept++ ? 0 : UINT64_MAX;
        return false;
    }
    talker->lines--;
    *ret_kept = talker->kept;
    talker->kept = 0;
    return true;
}

bool mokd_talk_may(uid_t uid)
{
    uint64_t kept;
    bool may = mokd_talk_may_at(uid, mok_now_ns(), &kept);

    if (kept == UINT64_MAX)
        mok_log(MOK_LOG_WARNING, "user", "causes too many lines: more about him are kept back", "uid=%u", uid);
    else if (kept > 0)
        mok_log(MOK_LOG_NOTICE, "user", "lines about him are logged again", "uid=%u kept_back=%" PRIu64, uid, kept);
    return may;
}

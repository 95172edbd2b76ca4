/* SPDX-License-Identifier: Apache-2.0 */
/* What the mesh says to people of states and of goodbyes. Nothing else of it is needed for that. */
#include <stdio.h>

#include "rack.h"
#include "util.h"

const char *rack_state_text(enum rack_state state)
{
    static const char *const texts[] = { "unknown", "up", "suspect", "lost", "left" };

    return (unsigned)state < ARRAY_SIZE(texts) ? texts[state] : "?";
}

void rack_goodbye_text(Mok__GoodbyeReason reason, const char *from, const char *to, char *ret)
{
    if (reason == MOK__GOODBYE_REASON__GOODBYE_REMOVED)
        snprintf(ret, RACK_MAX_TEXT, "node %s was removed from the configuration of node %s", to, from);
    else if (reason == MOK__GOODBYE_REASON__GOODBYE_LOST)
        snprintf(ret, RACK_MAX_TEXT, "it has lost this node");
    else
        snprintf(ret, RACK_MAX_TEXT, "it was stopped in order");
}

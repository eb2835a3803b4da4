/* The options --elastic-gpus, --elastic-nodes, --elastic-batch and --elastic-deadline of sbatch.
 *
 * A SPANK plugin cannot write a job's comment. So this one hands on the text of its options, as
 * ONES_ELASTIC="gpus=1-16 batch=32-1024" in the job's control environment, and slurm_ones.lua makes the comment of it.
 * It does nothing in a submission that gives none of its options, and nothing on a node.
 *
 * Part of slurm-ones, BSD-3-Clause.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <slurm/spank.h>

#define WORDS 4
#define MOST 64 /* bytes of a value, its end included */

/* Slurm knows the plugin and its options by this name, and so does slurm_ones.lua. */
SPANK_PLUGIN(slurm_ones, 1)

static const char *const words[WORDS] = {"gpus", "nodes", "batch", "deadline"};
static char values[WORDS][MOST];

static int take(int word, const char *value, int remote);

static struct spank_option options[WORDS] = {
    {"elastic-gpus", "RANGE", "slurm-ones may give the job GPUs in this range, such as 1-16", 1, 0, take},
    {"elastic-nodes", "RANGE", "slurm-ones may give the job whole nodes in this range, such as 1-4", 1, 1, take},
    {"elastic-batch", "RANGE", "slurm-ones may choose the global batch in this range, such as 32-1024", 1, 2, take},
    {"elastic-deadline", "TIME", "the job shall have ended by then, such as 2026-12-01T18:00 or 6h30m", 1, 3, take},
};

/* Called for each option, first of the script and then of the command line, so the last one counts. The
 * comment's maker checks what a value means; here it only has to be one word, since a comment is made of words. */
static int take(int word, const char *value, int remote)
{
    size_t length = value ? strlen(value) : 0;
    size_t i;

    if (remote || word < 0 || word >= WORDS)
        return 0;
    for (i = 0; i < length; i++)
        if (value[i] <= ' ' || value[i] > '~' || value[i] == ',')
            break;
    if (length == 0 || length >= MOST || i < length) {
        slurm_spank_log("ones: --elastic-%s: expected one word of at most %d characters, such as --elastic-%s",
                        words[word], MOST - 1, word == 3 ? "deadline=6h30m" : "gpus=1-16");
        return -1;
    }
    memcpy(values[word], value, length + 1);
    return 0;
}

/* Slurm leaves the options in the job's environment, and takes them from there as if they were given again. What is
 * submitted within an elastic job has not asked for that. */
static void forget(void)
{
    char name[96];
    int i;

    for (i = 0; i < WORDS; i++) {
        snprintf(name, sizeof name, "SLURM_SPANK__SLURM_SPANK_OPTION_slurm_ones_elastic_%s", words[i]);
        unsetenv(name);
    }
}

int slurm_spank_init(spank_t spank, int argc, char *argv[])
{
    int i;

    (void)argc;
    (void)argv;
    if (spank_context() != S_CTX_ALLOCATOR)
        return 0;
    forget();
    for (i = 0; i < WORDS; i++)
        if (spank_option_register(spank, &options[i]) != 0)
            slurm_debug("ones: --%s is not available", options[i].name);
    return 0;
}

int slurm_spank_init_post_opt(spank_t spank, int argc, char *argv[])
{
    char text[WORDS * (MOST + 16)] = "";
    size_t used = 0;
    int i;

    (void)argc;
    (void)argv;
    if (spank_context() != S_CTX_ALLOCATOR)
        return 0;
    for (i = 0; i < WORDS; i++)
        if (values[i][0])
            used += snprintf(text + used, sizeof text - used, "%s%s=%s", used ? " " : "", words[i], values[i]);
    if (used && spank_job_control_setenv(spank, "ONES_ELASTIC", text, 1) != 0) {
        slurm_spank_log("ones: the options --elastic-… cannot be handed on: write --comment=\"ones: %s\" instead", text);
        return -1;
    }
    return 0;
}

"""How long `hoploom partition --engine spark --method stream` takes: rounds over links between nodes, then new rows.

Work is counted in links: what a node asks for its place. A round of label propagation takes one unit of work a link;
the other steps are compared with that by their CPU time. The numbers of rounds and links are those of
hoploom.partition.spark, a test compares them. Clusters shrink as they did on graphs with planted communities.
"""

from collections.abc import Iterator

from hoploom.scale.constants import Constants
from hoploom.scale.sizes import picks_per_node
from hoploom.scale.spark import TIMES_WRITTEN, SparkRun, SparkStage, executors_of, row_bytes, stored_bytes
from hoploom.scale.spec import Question

SAMPLES, ENOUGH, KEPT = 16, 8, 8  # in-edges that a node asks; with fewer than enough, out-edges too
ROUNDS = 3  # of label propagation on each level, at most
PASSES = 8  # of moving single nodes, at most
USUAL_PASSES = PASSES // 2  # planted communities take three
LINKS = 32  # of a cluster, at most
MOST_CLUSTERS = 1 << 16  # levels that have no more are worked on by the driver, in the time of the start
LEVEL_STAGES = 2 * ROUNDS * 4 + 2 + 6 + 3  # rounds, clusters counted, their links, and back down

FIRST_SHRINK, SHRINK = 3.5, 8  # vertices of one cluster, on the first level and on others
# Units of work, for a link or an edge.
LINKING, CONTRACTING, MOVING, VISITING = 0.5, 8.0, 0.7, 0.5

# Bytes, before Spark compresses them.
SENT_EDGE = 16  # both ends
SENT_LABEL, SENT_PART = 12, 6  # in a round, of half of the links
SENT_VISITS = 8  # over each edge, in each hop but the first, which starts from the seeds
SENT_LINK = 60  # of clusters: to know both ends, in both directions, and to be kept
STORED_LINK = 12  # read again in each turn, of which a round has two
REWRITTEN_EDGE = 2 * 24  # to the new number of its source, then to its range
REWRITTEN_NODE = 2 * 16  # its numbers, besides its row


def spark_cut(question: Question, constants: Constants) -> SparkRun:
    """From a store to parts, both where all executors reach them."""
    executors, edges = executors_of(question), float(question.edges)
    cores, stored = executors * question.executor_cores, stored_bytes(question)
    first, levels = links_of_nodes(question), list(links_of_levels(question))
    links = sum(levels)
    linked, moved = edges * SENT_EDGE + first * SENT_EDGE, first * SENT_PART * USUAL_PASSES
    clustered = links * (SENT_LABEL * ROUNDS + SENT_LINK)
    hops = edges * (question.train_share + len(question.fanouts) - 1)
    rewritten = edges * REWRITTEN_EDGE + question.nodes * (REWRITTEN_NODE + row_bytes(question))

    def stage(name: str, work: float, shuffled: float, shared: float, more: float = 0.0) -> SparkStage:
        """`shared`: bytes of files that all executors reach, written and read."""
        return SparkStage(
            name,
            more + work / (constants.spark_links * cores),
            shuffled * (1 / constants.disk_write + 1 / constants.disk_read) / executors,
            (shuffled * (1 - 1 / executors) + shared) / question.network / executors,
        )

    rows = edges / constants.spark_rewrites + question.nodes * row_bytes(question) / constants.spark_writes
    stages = [
        SparkStage("start", constants.spark_cut_start),
        stage("link the nodes", edges * LINKING + first, linked, edges * 8 + first * STORED_LINK),
        stage(
            "find clusters",
            links * (ROUNDS + CONTRACTING),
            clustered,
            links * STORED_LINK * 2 * ROUNDS,
            len(levels) * LEVEL_STAGES * constants.spark_stage,
        ),
        stage("move nodes", first * MOVING * USUAL_PASSES, moved, first * STORED_LINK * 2 * USUAL_PASSES),
        stage("find the most used nodes", hops * VISITING, hops * SENT_VISITS, hops * 8),
        stage("write the parts", 0.0, rewritten, stored * (2 + TIMES_WRITTEN), rows / cores),
    ]
    return SparkRun(question, stages, linked + clustered + moved + hops * SENT_VISITS + rewritten)


def links_of_nodes(question: Question) -> float:
    """By the power law of picks_per_node."""
    degree = question.edges / question.nodes
    few = 1 - min(1.0, degree / 2 / ENOUGH) ** 2
    return question.nodes * (picks_per_node(degree, SAMPLES) + few * min(KEPT, degree))


def links_of_levels(question: Question) -> Iterator[float]:
    """Of the nodes, then of the clusters of each level, as long as Spark works on it."""
    vertices, links = float(question.nodes), links_of_nodes(question)
    shrink = FIRST_SHRINK
    while vertices > MOST_CLUSTERS:
        yield links
        vertices, shrink = vertices / shrink, SHRINK
        links = min(vertices * LINKS, 2 * links)  # a link leads from cluster to cluster, in both directions
